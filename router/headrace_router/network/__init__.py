"""The worker network: a gateway that takes requests, a broker that hands them out, workers that dial in and run them."""

"""`headrace bench`: a load client for every server that speaks OpenAI's or TGI's API, and its reports."""

"""What router, shard and launcher share. Free of torch and transformers."""

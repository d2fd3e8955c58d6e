"""What llama.cpp's server has beyond OpenAI's protocol, as its clients and its web page use it."""

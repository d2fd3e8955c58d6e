"""Chat templates in Jinja's sandbox, in a process of their own: they come with a model file and are not trusted."""

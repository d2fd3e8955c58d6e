"""HTTP in front of the engine. Each room may import only the rooms to its right:

    http (paths, sockets, start and shutdown) -> protocols (requests and responses by API) -> service (admission,
    preparation, running generations, status) -> text (token ids to the parts of an answer)

`errors.py` is for every room; `page/` holds the web page's files. No room knows an array library or the command line:
`commands/serve.py` passes in a function that loads a model.
"""

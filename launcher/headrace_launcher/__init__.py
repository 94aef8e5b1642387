"""The launcher: the command line, model resolution, and the processes it starts and watches."""

"""The CPU kernels: C++ over plain pointers (`src/`), compiled by `build.py`, called through `library.py`."""

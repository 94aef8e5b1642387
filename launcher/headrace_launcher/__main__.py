"""`python -m headrace_launcher` is `headrace serve`."""

from headrace_launcher.cli import launcher_main

if __name__ == "__main__":
    launcher_main()

"""`python -m thresher.cli`: the command line, where no script is installed."""

from thresher.cli.main import main

if __name__ == "__main__":
    main()

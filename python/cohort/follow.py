"""The command line of `cohort.Follow`: `python -m cohort.follow RUN --to wandb` logs a run that trains, or has ended."""
import argparse
import sys

from ._cohort import InputError
from ._follow import Follow


def main() -> int:
    """Follows the run in `sys.argv` and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cohort.follow", description="Logs the numbers of a run's metrics.jsonl, and its "
                                     "configuration, until the run has ended; started again, it continues.")
    parser.add_argument("run", metavar="RUN", help="the directory that `cohort train` printed")
    parser.add_argument("--to", required=True, choices=("wandb", "trackio"), help="the client, a package of that name")
    parser.add_argument("--project", default="cohort", help="of the client (default: cohort)")
    parser.add_argument("--offline", action="store_true", help="write a folder for `wandb sync`; trackio is always local")
    arguments = parser.parse_args()
    try:
        Follow(arguments.to, project=arguments.project, offline=arguments.offline).until_end(arguments.run)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

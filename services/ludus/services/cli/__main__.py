"""`python -m ludus.services.cli`: the same as `ludus`, for processes that start it."""

from ludus.services.cli.app import main

main()

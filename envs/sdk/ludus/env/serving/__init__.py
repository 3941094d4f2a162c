"""An environment server as a process: its options, command line, ports and life cycle."""

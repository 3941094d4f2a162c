"""Third-party programs, each confined as workers are and killed with all of its descendants."""

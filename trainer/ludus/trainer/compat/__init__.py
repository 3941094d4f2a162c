"""The APIs of other projects, implemented by Ludus. A script migrates by changing its imports."""

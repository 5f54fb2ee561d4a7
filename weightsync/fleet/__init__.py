"""Ray actors: the controller that drives updates, and the engines.

The controller and each engine are named, detached actors in the namespace
`weightsync-<fleet>`; they outlive the API process, and a later one finds them.
"""

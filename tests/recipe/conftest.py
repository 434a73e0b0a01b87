from fitting_nets import better, net  # noqa: F401

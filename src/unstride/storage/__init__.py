"""What any long work needs.

`artefacts` are files that are there whole or not at all, and are checked when read; `fingerprint` tells networks
apart; `distributed` deals work to processes; `progress` shows how far it is. Nothing here knows what the work is.
"""

"""Rates of this machine: of disks, device links and updates, measured once and kept in the user's cache."""

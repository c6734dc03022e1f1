"""Machines: what a campaign needs of the machines it runs on, looked at before anything starts.

installed, machine, trial, idle ─► doctor
part_settings, placement, ray_cluster ─► plan (the dry run)
node_check ─► node_look, on each node of a cluster
"""

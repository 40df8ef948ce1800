"""What tests need of the inside of the package: the only place of tests where most of its private modules are imported.

`states` to save and to compare, `saves` by DCP, `files` that are read raw and damaged, `faults` of system calls,
`snapshots` that are held up, `stores` of objects and local folders by one name, `devices`; ranks, children, machines,
jobs and servers as processes.
"""

"""Storage: the one package that touches a checkpoint's files, but for the large ones that the engine streams."""

def attack(field):
    yield from ()

"""How this repository becomes the distribution `deepspeed`.

The repository holds only the files that the fork wrote. This package fetches the base release pinned in
`pyproject.toml`, lays the fork's files over it and hands the result to the base's own `setup.py`:

    pyproject.toml -> manifest -> check, tree -> backend (PEP 517)
                      base_release ---^

`python -m fork` is the maintainer's side of it: the check of the overlay, its contract with the base, and a preview
of what a newer base release would touch. Nothing here is installed with the distribution.
"""

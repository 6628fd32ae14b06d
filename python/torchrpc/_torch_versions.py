"""The minor releases of torch that this version supports. This is the only list: setup.py and CMake read it.

The C++ interfaces of torch differ between minor releases, so the package has binaries for each release:
`_built/torch<release>`.
"""

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

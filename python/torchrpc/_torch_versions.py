"""The minor releases of torch that this version supports: the only place that says so (setup.py and CMake read it).

C++ interfaces differ between them, so the package has binaries for each: `_built/torch<release>`.
"""

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

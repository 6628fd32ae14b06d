"""The releases of torch that this version supports: the only place that says so (setup.py and CMake read it).

An extension is built for one of them, since C++ interfaces differ between releases; `_built` says for which.
"""

SUPPORTED = ("2.11", "2.12", "2.13", "2.14")

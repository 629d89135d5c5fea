"""Sphinx configuration; `make docs` builds with warnings as errors."""

from sphinx.ext.autodoc.mock import mock

import horovod_sparse

with mock(["horovod"]):  # built where it is not installed, too
    from horovod_sparse.frontends.horovod import optimizer
    from horovod_sparse.frontends.local_sgd import optimizer as local_sgd

project = "horovod_sparse"
author = "the horovod_sparse authors"
copyright = author
version = release = horovod_sparse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

# Users meet the optimizer's methods on what DistributedOptimizer returns, which is a class made at run time.
optimizer.optimizer = optimizer._Optimizer
optimizer._Optimizer.__qualname__ = "optimizer"
local_sgd.optimizer = local_sgd._Local
local_sgd._Local.__qualname__ = "optimizer"

html_theme = "furo"
html_title = f"horovod_sparse {version}"

myst_heading_anchors = 3

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Array": "Array", "Segments": "Segments"}
autodoc_typehints = "description"
# Without this, a function whose docstring explains no argument would get a list of bare types.
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
# An attribute is documented where its class is; as an object of its own it would clash with the dataclass field.
napoleon_use_ivar = True

"""Every name of torch's own RPC modules exists in the modules that replace them, or has a reason not to."""

import json

# The names of stock torch: {module: [names]}, with the members of its classes as "Class.member". An imported name
# counts in the module that defines it; torch.distributed.rpc also counts the RPC names that it imports.
LIST_STOCK = """
import importlib, json, sys, types
import torch.distributed.rpc._testing

MODULES = [
    *["torch.distributed.rpc" + leaf for leaf in ("", ".api", ".backend_registry", ".constants", ".functions",
      ".internal", ".options", ".rref_proxy", ".server_process_global_profiler", "._utils", "._testing",
      "._testing.faulty_agent_backend_registry")],
    "torch.distributed.autograd", "torch.distributed.optim.optimizer", "torch.distributed.nn",
    "torch.distributed.nn.api.remote_module",
    "torch._C._distributed_rpc", "torch._C._distributed_autograd", "torch._C._distributed_rpc_testing",
]

def home(value):
    return getattr(value, "__module__", None) if callable(value) else None

def counts(module, name, value):
    if name.startswith("__") or isinstance(value, types.ModuleType):
        return not name.startswith("_") and value.__name__ in MODULES and value.__name__.startswith(module)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return home(value) == module or module == "torch.distributed.rpc" and home(value) in MODULES
    return home(value) is None and type(value).__module__ in ("builtins", "datetime", "enum", "_thread")

found = {}
for module in MODULES:
    loaded = importlib.import_module(module)
    names = [name for name, value in vars(loaded).items() if counts(module, name, value)]
    for name in list(names):
        value = getattr(loaded, name)
        if isinstance(value, type) and home(value) == module:
            names += [f"{name}.{member}" for member in vars(value) if not member.startswith("__")]
    found[module] = sorted(names)
print(json.dumps(found))
"""

LIST_MISSING = """
import importlib, json, operator, sys
import torchrpc
torchrpc.install()
import torch, torch.distributed.rpc._testing

def has(module, name):
    owner = name.rpartition(".")[0]
    if owner and not has(module, owner):
        return True  # it is missed as a whole
    try:
        operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError):
        return False
    return True

found = json.load(open(sys.argv[1]))
print(json.dumps({module: [name for name in names if not has(module, name)] for module, names in found.items()}))
"""


RPC = "torch.distributed.rpc"
# The missing names: {reason: {module: names}}. No code of users is known that needs them.
LEFT_OUT = {
    "left over in a module by the way it is written": {
        RPC: "method_factory new_method",
        f"{RPC}.api": "docstring method_factory method_name new_method",
        f"{RPC}.backend_registry": "_backend_type_doc _backend_type_repr",
        f"{RPC}.options": "_is_tensorpipe_available",
        "torch.distributed.autograd": "TYPE_CHECKING",
    },
    "groups that follow one another on a store are counted in the store, not in the process": {
        RPC: "_init_counter _init_counter_lock",
    },
    "the pickler has no methods by type": {
        f"{RPC}.internal": "_InternalRPCPickler._py_rref_receiver "
        "_InternalRPCPickler._py_rref_reducer _InternalRPCPickler._rref_reducer "
        "_InternalRPCPickler._script_module_receiver _InternalRPCPickler._script_module_reducer "
        "_InternalRPCPickler._tensor_receiver _InternalRPCPickler._tensor_reducer",
    },
    "profilers are served by the core (_CallRange)": {
        f"{RPC}.api": "_enable_rpc_profiler _get_should_profile",
    },
    "the core exchanges the devices, in the store where workers meet, and not by calls or over gloo": {
        f"{RPC}.backend_registry": "_create_device_list _create_reverse_mapping _get_device_infos "
        "_set_devices_and_reverse_device_map _tensorpipe_exchange_and_check_all_device_maps "
        "_tensorpipe_validate_devices _validate_device_maps",
    },
    "the owners' half of DistributedOptimizer is in the core, or in torchrpc.optim._parts": {
        "torch.distributed.optim.optimizer": "_ScriptLocalOptimizer _ScriptLocalOptimizerInterface "
        "_new_script_local_optimizer functional_optim_map "
        # Since torch 2.14:
        "_FunctionalLocalOptimizer _functional_local_optimizer_step _new_functional_local_optimizer",
    },
    "RemoteModule is built in another way": {
        "torch.distributed.nn.api.remote_module": "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING "
        "_SerializedRemoteModule "
        "_create_module_with_interface _instantiate_template _param_rrefs _raise_not_supported "
        "_recursive_script_module_receiver _recursive_script_module_reducer _remote_module_receiver "
        "_remote_module_reducer",
    },
}


def left_out(stock):
    """The left out names that this release of torch has."""
    names = {(module, name) for why in LEFT_OUT.values() for module, names in why.items() for name in names.split()}
    return {(module, name) for module, name in names if name in stock.get(module, [])}


def test_all_names_exist_except_those_with_a_reason(run_python, tmp_path):
    stock = run_python("-c", LIST_STOCK).stdout
    names = json.loads(stock)
    assert sum(map(len, names.values())) > 300 and "rpc_sync" in names[RPC] and "PyRRef" in names[RPC]
    (tmp_path / "stock.json").write_text(stock)
    missing = json.loads(run_python("-c", LIST_MISSING, tmp_path / "stock.json").stdout)
    assert {(module, name) for module, names in missing.items() for name in names} == left_out(names)


USE_ABSENT = """
import logging
import torchrpc
torchrpc.install()
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import _invoke_rpc_builtin, _invoke_remote_python_udf
from torch.distributed.rpc.api import _invoke_rpc, _ALL_WORKER_NAMES
from torch.distributed.rpc.internal import _thread_local_tensor_tables
from torch.distributed.rpc.rref_proxy import _local_invoke

for name, use in {
    "_invoke_rpc_builtin": lambda: _invoke_rpc_builtin("worker1", "aten::add", -1.0, 1, 2),
    "_invoke_remote_python_udf": lambda: torch._C._distributed_rpc._invoke_remote_python_udf("worker1"),
    "_invoke_rpc": lambda: _invoke_rpc("worker1", max, lambda: None),
    "_local_invoke": lambda: rpc.rref_proxy._local_invoke(None, "method", (), {}),
    "_thread_local_tensor_tables": lambda: _thread_local_tensor_tables.send_tables,
}.items():
    try:
        print(name, "can be used:", use())
    except (NotImplementedError, AttributeError) as error:
        assert str(error).startswith(f"torchrpc has no {name}: "), error
assert rpc.logger is logging.getLogger(rpc.logger.name) and logging.getLogger(rpc.api.logger.name).parent is rpc.logger
assert _ALL_WORKER_NAMES == set()
"""


def test_names_that_stand_for_nothing_can_be_imported_and_say_what_to_use(run_python):
    assert run_python("-c", USE_ABSENT).stdout == ""

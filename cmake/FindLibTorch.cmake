# LibTorch as the chosen Python has it installed: targets torch_cpu and torch_python.
#
# Not torch's own TorchConfig.cmake: that one looks for whatever torch was built with (a CUDA toolkit, MKL, kineto),
# and torchrpc needs two libraries and the headers.
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../python/torchrpc/_torch_versions.py supported REGEX "^SUPPORTED")
string(REGEX MATCHALL "[0-9]+\\.[0-9]+" LibTorch_SUPPORTED "${supported}")
list(JOIN LibTorch_SUPPORTED ", " supported)

# Where torch is another machine's (a cross build) or has a second path, LibTorch_DIR names the folder with include/ and
# lib/.
if(LibTorch_DIR)
  file(STRINGS ${LibTorch_DIR}/version.py LibTorch_VERSION REGEX "^__version__ = ")
  string(REGEX REPLACE "^[^'\"]*['\"]([^'\"]*)['\"].*" "\\1" LibTorch_VERSION "${LibTorch_VERSION}")
else()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u, importlib.metadata as m, os; \
             print(os.path.dirname(u.find_spec('torch').origin) + ';' + m.version('torch'))"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR
      "${Python_EXECUTABLE} has no torch. Install one of the releases ${supported} there, or name another Python with "
      "-DPython_EXECUTABLE=...")
  endif()
  list(GET found 0 LibTorch_DIR)
  list(GET found 1 LibTorch_VERSION)
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" LibTorch_RELEASE "${LibTorch_VERSION}")
if(NOT LibTorch_RELEASE IN_LIST LibTorch_SUPPORTED AND NOT TORCHRPC_ALLOW_ANY_TORCH)
  message(FATAL_ERROR
    "${Python_EXECUTABLE} has torch ${LibTorch_VERSION}; this torchrpc supports the releases ${supported}, whose C++ "
    "interfaces it knows. Install one of these, or try this one with -DTORCHRPC_ALLOW_ANY_TORCH=ON.")
endif()
if(TORCHRPC_WITH_TENSORPIPE AND NOT EXISTS ${LibTorch_DIR}/include/tensorpipe/tensorpipe.h)
  message(FATAL_ERROR
    "torch in ${LibTorch_DIR} was built without TensorPipe: give -DTORCHRPC_WITH_TENSORPIPE=OFF, which leaves the native "
    "transport.")
endif()
message(STATUS "LibTorch ${LibTorch_VERSION}: ${LibTorch_DIR}")

function(add_libtorch_target name)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES
    IMPORTED_LOCATION ${LibTorch_DIR}/lib/lib${name}.so
    INTERFACE_INCLUDE_DIRECTORIES "${LibTorch_DIR}/include;${LibTorch_DIR}/include/torch/csrc/api/include")
endfunction()
add_libtorch_target(c10)
add_libtorch_target(torch_cpu)
add_libtorch_target(torch_python)
# What torch's own headers look at, as torch was built. Not USE_RPC: it only makes torch/csrc/jit/python/pybind_utils.h
# recognise the RRefs of torch's own RPC, for which it includes all operators.
target_compile_definitions(torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
if(EXISTS ${LibTorch_DIR}/include/tensorpipe/tensorpipe.h)
  target_compile_definitions(torch_cpu INTERFACE USE_TENSORPIPE)
endif()
target_link_libraries(torch_cpu INTERFACE c10)
target_link_libraries(torch_python INTERFACE torch_cpu Python::Module)

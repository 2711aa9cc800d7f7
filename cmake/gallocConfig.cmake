# find_package(galloc) gives the target galloc::galloc: the folder of galloc.h, the CUDA runtime, and threads.
include(CMakeFindDependencyMacro)
find_dependency(CUDAToolkit 12.0)
# CMake looks for threads only in projects of C or C++; one of CUDA C++ alone links them anyway.
set(galloc_threads)
if(CMAKE_C_COMPILER OR CMAKE_CXX_COMPILER)
  find_dependency(Threads)
  set(galloc_threads Threads::Threads)
endif()
if(NOT TARGET galloc::galloc)
  add_library(galloc::galloc INTERFACE IMPORTED)
  get_filename_component(galloc_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  set_target_properties(galloc::galloc PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${galloc_prefix}/include"
    INTERFACE_LINK_LIBRARIES "CUDA::cudart;${galloc_threads}")
endif()

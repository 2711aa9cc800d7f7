"""galloc as a memory resource of RMM. Needs galloc.py. RMM calls Python for each allocation: for trying it out. In a
C++ program use galloc::resource of galloc.hpp, or galloc::rmm_resource before RMM 26.06.

    rmm.mr.set_current_device_resource(galloc_rmm.resource())
"""

import rmm

import galloc


def resource(device=None, pool=None):
    """device: whose default pool it is; None: the current one."""
    pool = pool or galloc.default_pool(device)
    return rmm.mr.CallbackMemoryResource(pool.malloc, lambda ptr, size, stream: pool.drop(ptr, stream))

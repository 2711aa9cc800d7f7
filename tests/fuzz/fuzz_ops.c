/* fuzz_ops.c - a fuzzer for sequences of operations: see fuzz_machine.h. With FUZZ_MAIN defined: a program that
   runs the files it is given. */

#include "fuzz_machine.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    galloc_config config = galloc_config_default();
    machine m;
    machine_begin(&m, data, size, &config);
    while (m.at < m.end) step(&m);
    machine_end(&m);
    return 0;
}

#ifdef FUZZ_MAIN
#include "fuzz_main.h"
#endif

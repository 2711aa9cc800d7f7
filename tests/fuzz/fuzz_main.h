/* fuzz_main.h - runs a fuzzer's function on the files named, without the fuzzer: to have a finding again. */

#ifndef FUZZ_MAIN_H
#define FUZZ_MAIN_H

#include <stdio.h>

int main(int argc, char **argv)
{
    static uint8_t data[1 << 16];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) {
            perror(argv[i]);
            return 1;
        }
        size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%d files\n", argc - 1);
    return 0;
}

#endif

/* override_libraries.c - a program with two libraries (override_library.c), each with a heap of its own. */

#include <stdio.h>

int override_first(void);
int override_second(void);

int main(void)
{
    int i, failed = 0;
    for (i = 0; i < 2; i++) {
        int first = override_first(), second = override_second();
        if (first || second) printf("the first library returned %d, the second one %d\n", first, second);
        failed |= first || second;
    }
    return failed;
}

#pragma once
#include <stdint.h>

void stop_clocks(void);
void pass(uint64_t ns);
void let_clocks_go(void);

/* The two rings that Python drains: observations and live cost tables. */
#ifndef ZEROTUNE_RECORDS_H
#define ZEROTUNE_RECORDS_H

#include <stdbool.h>
#include <stdint.h>

#include "../zerotune_plugin.h"

bool zt_record_push(const zt_record *record);
bool zt_cost_push(const zt_cost_record *record);
void zt_records_prepare(void); /* before the first push, which would wait for memory otherwise */
uint64_t zt_records_dropped(void);
uint64_t zt_costs_dropped(void);
void zt_records_reset(void);

#endif

"""The pure middle: no await, no clock, no client, no logging. Frozen views in, plans out."""

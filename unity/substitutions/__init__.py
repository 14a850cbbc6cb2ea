"""Rules over the operator table: their language, their application to programs, their generation, and other systems' rules."""

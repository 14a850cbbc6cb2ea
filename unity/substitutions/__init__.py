"""Terms and rules over the operator table: their text, their types, how they are found, and other systems' rules."""

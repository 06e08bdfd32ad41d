"""The toolbox: each tool stands apart, and no other room imports one."""

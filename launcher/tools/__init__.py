"""The tools: a folder or module each. Of launcher, only cli, api and other tools import one."""

"""The pytest plugin: multirank tests on pools of rank processes."""

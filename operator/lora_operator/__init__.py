"""The operator: one pure decision between an observation and its application."""

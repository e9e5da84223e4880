"""What one step needs and when: trace, costs, plan, simulation, lower bound. Pure data; nothing here moves a byte."""

"""What a pass needs and when: its trace, and a plan made from it. Pure data; nothing here moves a byte."""

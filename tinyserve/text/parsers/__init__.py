"""What models write around their answers: thoughts, and calls of tools. One machine reads all formats, from tables.

Start with machine.py; each family of models is a table (json_families.py, named_families.py, xml_families.py,
other_families.py), and registry.py finds the table for a model.
"""

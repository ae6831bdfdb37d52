"""What ``make docs`` adds to mkdocs: pages that are generated, links that lead out of ``docs/``, and the navigation.

- ``markdown``: headings, links and fenced blocks of a page; the tests of the documents use it too
- ``places``: where a file of the repository is in the site; ``names`` and ``commands``: the generated reference;
  ``docstrings``: a docstring as Markdown
- ``navigation``: the map as mkdocs wants it; ``hooks``: what mkdocs calls; ``extension``: docstrings, for mkdocstrings
"""

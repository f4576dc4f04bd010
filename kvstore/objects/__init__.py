"""For backends whose medium keeps whole objects under text keys: buckets, directories, archives.

:class:`~kvstore.objects.medium.ObjectMedium` is the small contract with the medium; everything
else, such as packing runs of blocks into one object and finding them again, is done here once.
"""

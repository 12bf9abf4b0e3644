"""`pdserve doctor`: facts are gathered, findings follow from them purely, a report shows both.

facts.look    blocking: libfabric, sysfs, limits      before the event loop
facts.probe   measuring, asking peers                 in it
findings      facts -> sentences                      pure
report        facts -> lines, facts -> JSON           pure
"""

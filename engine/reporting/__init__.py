"""engine/reporting"""

"""engine/config"""

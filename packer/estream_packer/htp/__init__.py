"""Graphs for Qualcomm's Hexagon tensor processor (HTP): built, compiled and proven. FORMAT.md section 10.3."""

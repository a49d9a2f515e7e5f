"""Tests of files and batches."""

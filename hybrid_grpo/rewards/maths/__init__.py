"""Grading of mathematical answers: `answers` finds them, `parser` parses them, `grader` compares them."""

"""The maths grader: `reward` finds the stated answer, `reading` reads it, `grading` compares two of them."""

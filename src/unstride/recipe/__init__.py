"""What is asked for: views, stages and recipes as frozen nouns, their presets and their files. Runs nothing."""
